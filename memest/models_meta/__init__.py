"""What is trained: names, config files, the module on the meta device and its batch.

`registry` finds a config by name, `build` makes the module from it, `batch` makes the inputs that
its forward takes. Nothing heavy is imported here: `memest models` needs neither torch nor
transformers.
"""

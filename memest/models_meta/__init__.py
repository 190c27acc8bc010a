"""Models for plans: names, config files, modules on the meta device, and batches.

`registry` finds a config by name, `build` makes the module from it, and `batch` makes the inputs of
its forward. Nothing heavy is imported here: `memest models` needs neither torch nor transformers.
"""

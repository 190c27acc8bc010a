"""Dynamo under the patches of memest: functions, hooks, guards and failures."""

from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.integrations.inductor import compiler
from memest.estimator.tensors.patches import Patches, constant
from memest.estimator.tensors.placement import INSIDE
from memest.estimator.torch_api.cuda.driver import DeviceProperties

COMPILED = "`torch.compile`: torch {version} compiled the script; padding of products is {how}"
BROKEN = "`torch.compile` broke a graph where it breaks none on a GPU: {why}"


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Patch Dynamo, once it is imported, to compile code that runs on the virtual GPU."""
    modules = mode.attribution.modules

    def after_import(dynamo: Any) -> None:
        _install_frames(patches, mode, dynamo)
        # guards are built under the hooks and the mode under which they are evaluated
        manager = dynamo.guards.CheckFunctionManager
        patches.within(manager, "__init__", lambda *_: modules.with_hooks())
        patches.within(manager, "__init__", lambda *_: mode)
        patches.on_undo(dynamo.reset)  # frames that this run compiled call its replacements
        _install_functions(patches, dynamo)
        patches.within(  # to trace a step, Dynamo runs `_init_group`, which makes the states
            dynamo.variables.optimizer.OptimizerVariable, "call_method",
            lambda self, tx, name, *_: mode if name == "_init_group" else nullcontext(),
        )  # fmt: skip
        _install_device(patches, dynamo.device_interface)
        _install_autograd(patches, mode, dynamo)

        @patches.wrap(dynamo.exc.Unsupported, "__init__")
        def init_and_warn(init: Any, self: Any, msg: str, *args: Any, **kwargs: Any) -> None:
            """Run `init`, a graph break's `__init__`; warn first if memest's code is the cause."""
            line = next((line for line in msg.splitlines() if "memest.estimator" in line), None)
            if line is not None and "_install_steps" not in line:  # the step within is one graph
                mode.guesses.warn(BROKEN.format(why=line.strip()[:200]))
            init(self, msg, *args, **kwargs)

    if hasattr(torch.nn.modules.module, "_has_any_global_hook"):  # torch warns of a script's hooks
        patches.within(torch.nn.modules.module, "_has_any_global_hook", modules.without_hooks)
    hooks.within("torch._dynamo", patches.suspended)  # its tables name functions of torch
    hooks.within("torch._inductor.cudagraph_trees", patches.suspended)  # requires a CUDA build
    hooks.after("torch._dynamo", after_import)
    hooks.after("torch._higher_order_ops.flex_attention", partial(_install_flex, patches, mode))


def _install_flex(patches: Patches, mode: CudaSimMode, flex: Any) -> None:
    """Make `flex_attention` trace its score function with fake tensors, also in eager mode."""

    @patches.wrap(flex, "create_fw_bw_graph")
    def create_graphs(create: Any, *args: Any) -> Any:
        if INSIDE.compiles:
            return create(*args)
        hooks, fakes = mode.attribution.modules.without_hooks(), FakeTensorMode()
        example_grad = torch.empty((), device="cuda")  # torch's own is not a fake tensor
        with _disable_current_modes(), compiler.as_the_compiler(mode), hooks, fakes:
            forward, joint = create(*args)
        del example_grad
        compiler.place_on_gpu(joint)
        return forward, joint


def _install_autograd(patches: Patches, mode: CudaSimMode, dynamo: Any) -> None:
    """Let compiled autograd trace a backward without dispatch modes and memest's hooks."""
    instance = dynamo.compiled_autograd.AutogradCompilerInstance

    @patches.wrap(instance, "begin_capture")
    def begin(capture: Any, self: Any, *args: Any) -> Any:
        hooks = mode.attribution.modules.without_hooks()
        for context in (_disable_current_modes(), compiler.as_the_compiler(mode), hooks):
            self.stack.enter_context(context)
        return capture(self, *args)


def _install_frames(patches: Patches, mode: CudaSimMode, dynamo: Any) -> None:
    """Make Dynamo compile frames as on a GPU. The compilation of a frame can fail here although it
    would not fail on a real GPU. Such a frame runs eagerly, and a warning reports it."""
    from torch._dynamo import exc

    convert_frame = dynamo.convert_frame
    # DDPOptimizer compiles a frame under the script's modes
    patches.within(convert_frame, "_compile", lambda *_: mode.attribution.modules.without_hooks())
    patches.within(convert_frame, "_compile", lambda *_: compiler.as_the_compiler(mode))
    patches.within(convert_frame, "_compile", lambda *_: _disable_current_modes())

    @patches.wrap(convert_frame, "_compile")
    def compile_frame(compile_code: Any, code: Any, *args: Any, **kwargs: Any) -> Any:
        dynamo.trace_rules.get_torch_obj_rule_map()  # fills the tables
        try:
            result = compile_code(code, *args, **kwargs)
        except Exception as error:
            if _is_of_dynamo(error):
                raise
            name = getattr(code, "co_qualname", code.co_name)
            mode.guesses.warn(compiler.EAGERLY.format(name=name, why=compiler.why(error)))
            if not isinstance(error, exc.BackendCompilerFailed):
                return getattr(convert_frame, "ConvertFrameReturn", constant(None))()
            # again with the eager backend, the fifth argument of `_compile`
            args = *args[:4], lambda graph, inputs: graph.forward, *args[5:]
            return compile_code(code, *args, **kwargs)
        padding = "estimated" if compiler.is_estimated() else "left out"
        mode.notes.add(COMPILED.format(version=torch.__version__.partition("+")[0], how=padding))
        return result

    if not hasattr(convert_frame, "is_in_any_mode_without_ignore_compile_internals"):
        patches.set(convert_frame, "is_in_torch_dispatch_mode", lambda **options: False)


def _is_of_dynamo(error: Exception) -> bool:
    """Return whether Dynamo would raise `error` on a GPU as well."""
    from torch._dynamo import exc

    if isinstance(error, exc.BackendCompilerFailed):
        return error.backend_name != "inductor"
    sim_errors = (exc.InternalTorchDynamoError, exc.TorchRuntimeError, compiler.NotSimulated)
    return not isinstance(error, sim_errors)


def _install_functions(patches: Patches, dynamo: Any) -> None:
    """Make Dynamo trace memest's replacements of torch functions as the originals."""
    rules, functions = dynamo.trace_rules, dynamo.variables.torch
    builder = dynamo.variables.builder.VariableBuilder
    sourceless_builder = dynamo.variables.builder.SourcelessBuilder
    # functions that Dynamo calls while it traces, such as `torch.cuda.is_available`
    foldable_functions = functions.constant_fold_functions
    originals = patches.originals()
    foldable = [new for new, original in originals.items() if original in foldable_functions]
    for replacement in foldable:
        del originals[replacement]
        patches.set_item(foldable_functions, replacement, None)
    make_table, clear_caches = rules.get_torch_obj_rule_map, rules.clear_lru_cache

    @cache
    def table() -> dict[Any, Any]:
        """Return {torch function: Dynamo's class of variables for it}, made without the patches."""
        with patches.suspended():
            clear_caches()
            classes: dict[Any, Any] = make_table()
            rules.get_tensor_method()  # this and the next fill caches
            functions.TorchInGraphFunctionVariable._get_handlers()
        classes.update(dict.fromkeys(foldable, functions.TorchInGraphFunctionVariable))
        return classes

    patches.set(rules, "get_torch_obj_rule_map", table)
    patches.on_undo(clear_caches)
    dynamo.utils.common_constant_types.add(DeviceProperties)
    if not any("memest" in folder for folder in rules.SKIP_DIRS):
        rules.add("memest")
    wrap, create = builder._wrap, sourceless_builder.create

    def original(value: Any) -> Any:
        with suppress(Exception):  # it has no hash, or is under construction
            return originals.get(value, value)
        return value

    patches.set(builder, "_wrap", lambda self, value: wrap(self, original(value)))
    create_original = staticmethod(lambda tx, value: create(tx, original(value)))
    patches.set(sourceless_builder, "create", create_original)


def _install_device(patches: Patches, module: Any) -> None:
    """Patch the copies of `torch.cuda`'s functions in Dynamo's device interface, in `module`."""
    patches.set(module, "caching_worker_device_properties", {})  # cached for an earlier GPU
    interface = module.CudaInterface
    replacements = {original: replacement for replacement, original in patches.originals().items()}
    for name, value in list(vars(interface).items()):
        is_static = isinstance(value, staticmethod)
        replacement = replacements.get(value.__func__ if is_static else value)
        if replacement is not None:
            patches.set(interface, name, staticmethod(replacement) if is_static else replacement)
    getattr(module, "init_device_reg", constant(None))()  # torch 2.5 needs each GPU by its number

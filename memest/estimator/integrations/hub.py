"""Hugging Face Hub (huggingface_hub 1.33): a simulated script downloads, but uploads nothing.

Tensors that the script would upload have no values.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from memest.estimator.gpu.imports import ImportHooks, replace_everywhere
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.tensors.patches import Patches

NOT_SENT = "nothing is sent to the Hugging Face Hub"  # note of a run that would send something

_COMMITS = (
    "create_commit", "delete_file", "delete_files", "delete_folder", "upload_file", "upload_folder",
)  # fmt: skip
"""Methods that return a commit."""

_WITHOUT_COMMIT = (
    "create_branch", "create_pull_request", "create_repo", "create_tag", "delete_branch",
    "delete_repo", "delete_tag", "move_repo", "preupload_lfs_files", "super_squash_history",
    "update_repo_settings", "upload_large_folder",
)  # fmt: skip
_NO_COMMIT = "0" * 40


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks) -> None:
    """Replace the Hub's functions that upload, if a script imports `huggingface_hub`."""

    def replace(module: Any) -> None:
        functions = []
        for name in (*_COMMITS, *_WITHOUT_COMMIT):
            if not hasattr(module.HfApi, name):  # absent in older releases
                continue
            method = _unsent(module, name, mode.notes.add)
            patches.set(module.HfApi, name, method)
            if hasattr(module, name):  # a method of the module's own `HfApi`
                functions.append((getattr(module, name), partial(method, module.api)))
        replace_everywhere(patches, functions)

    hooks.after("huggingface_hub.hf_api", replace)


def _unsent(module: Any, name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    """Return a replacement of `HfApi`'s method `name`, which calls `note(text)` and uploads
    nothing. `module` is `huggingface_hub.hf_api`.

    The result of the replacement depends on `name`. For `create_repo` it is a `RepoUrl` of
    `module`. For a method of `_COMMITS`, such as `upload_file`, it is a `CommitInfo` of `module`.
    For any other method it is None. With `run_as_future=True`, the result is in a `Future`.
    """

    def call(api: Any, *args: Any, **kwargs: Any) -> Any:
        note(NOT_SENT)
        repo = kwargs.get("repo_id") or next((a for a in args if isinstance(a, str)), "")
        folder = {"dataset": "datasets/", "space": "spaces/"}.get(kwargs.get("repo_type") or "", "")
        url = f"{module.constants.ENDPOINT}/{folder}{repo}"
        result = None
        if name == "create_repo":
            result = module.RepoUrl(url)
        elif name in _COMMITS:
            result = module.CommitInfo(
                commit_url=f"{url}/commit/{_NO_COMMIT}",
                commit_message=kwargs.get("commit_message") or "",
                commit_description=kwargs.get("commit_description") or "",
                oid=_NO_COMMIT,
            )
        if not kwargs.get("run_as_future"):
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    return call

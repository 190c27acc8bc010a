"""Configs by name: a bundled model, a config.json on disk, or one on the Hugging Face Hub.

Only JSON is read here; transformers is imported to resolve a config, never to list the models.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.errors import MemestError, PlanError, UnknownModelError, UnsupportedError, closest
from memest.packages import PLANS, require
from memest.plan.reading import read_limited

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

CONFIG_DIR = Path(__file__).parent / "configs"

MAX_CONFIG_BYTES = 8 * 2**20  # larger ones are rejected; real ones have at most 1 MiB
COUNT_LIMITS = {
    re.compile(r"layers?$|^n_layer$|blocks$|depths?$"): 4096,
    re.compile(r"experts$|stages$|levels$|groups$"): 16384,
    re.compile(r"^num_labels$"): 2**20,
}
"""Largest number that a key of this form may have. Each counts Python objects that the model class
makes, so a wrong value would never end. The largest published models have 126 layers (Llama 3.1
405B) and 512 experts (Qwen3-Next).
"""

_MODEL_CLASS = re.compile(r"(For[A-Z]\w+|Model|LMHead\w*)$")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """Bundled model: its names, numbers of parameters and sources, without its config."""

    name: str  # last part of the Hub id, and name of the file
    hub_id: str
    aliases: tuple[str, ...]  # other names, matched like `name`
    family: str
    modality: str  # `text`, `image`, `image-text` or `audio`
    num_params: int  # parameters of the class in `architectures`; a tied tensor counts once
    num_params_published: int  # in the published checkpoint; `note` explains a difference
    source: Mapping[str, str]  # sources of the config and of the published count
    note: str = ""

    @property
    def path(self) -> Path:
        """Path of the bundled JSON file, which has the config too."""
        return CONFIG_DIR / f"{self.name}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A checked config.json, from which a module can be built."""

    name: str  # name of the model in reports
    source: str  # `bundled`, the path of the file, or `hub:org/name`
    pretrained: "PretrainedConfig" = field(repr=False)  # `build_model` works on a copy
    architecture: str  # model class in `architectures`; empty when the file names none
    entry: ModelEntry | None = None  # registry entry of a bundled config
    remote_code: str = ""  # folder or Hub id of the model's own code; else empty

    @property
    def model_type(self) -> str:
        """transformers' name of the family, such as `llama`."""
        return str(self.pretrained.model_type)

    @property
    def saved_dtype(self) -> "torch.dtype":
        """Dtype of the published weights according to the config; float32 if it gives none."""
        import torch

        dtype = getattr(self.pretrained, dtype_keyword(), None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32


def list_models() -> list[ModelEntry]:
    """Return the bundled models, sorted by name without regard to case."""
    return sorted(_entries().values(), key=lambda entry: entry.name.casefold())


def find_entry(name: str) -> ModelEntry | None:
    """Return the bundled model with this short name, Hub id or alias; None if there is none.

    Case is ignored, and so are `-`, `_` and blanks. Between two digits, `-`, `_` and a blank are
    not ignored, but equal to each other: `3_18` is `3-18`, and not `318`.

    >>> find_entry("salesforce/BLIP2-flan-t5-xxl").name, find_entry("openllama-7b").name
    ('blip2-flan-t5-xxl', 'open_llama_7b')
    """
    return _entries_by_key().get(_key(name))


def resolve_config(
    name: str, *, trust_remote_code: bool = False, packages: Sequence[str] = PLANS
) -> ModelConfig:
    """Return the config that `name` refers to, after a check that `packages` are installed.

    `name` is tried as a bundled name, a path (a config.json or its folder), and a Hub id
    `org/name`, in this order. Only the config.json of a Hub id is downloaded. `trust_remote_code`
    also loads and runs the code that the config names.

    Raises:
        UnknownModelError: nothing has this name, or the Hub cannot be reached.
        PlanError: the file is not a config that transformers can read.
        UnsupportedError: the config names code of its own that is not trusted, or is of a quantised
            checkpoint; or one of `packages` is not installed.
    """
    if not name.strip():
        raise _unknown(name)
    require(*packages)
    entry = find_entry(name)
    if entry is not None:
        raw = _read_json(entry.path)["config"]
        return parse_config(raw, name=entry.name, source="bundled", entry=entry)
    path = _config_path(name)
    if path is not None:
        label = path.parent.name if path.name == "config.json" else path.stem
        remote = str(path.parent) if trust_remote_code else ""
        return parse_config(
            _read_json(path), name=label or name, source=str(path), remote_from=remote
        )
    if _HUB_ID.fullmatch(name):
        raw = _read_json(_download_config(name))
        remote = name if trust_remote_code else ""
        return parse_config(raw, name=name.split("/")[1], source=f"hub:{name}", remote_from=remote)
    raise _unknown(name)


def check_name(name: str) -> None:
    """Check a model's `name` without the network, and without imports of other packages.

    Raises:
        UnknownModelError: `name` is no bundled model, no path of a config, and no possible Hub id.
        UnsupportedError: a package that plans need is not installed.
    """
    if find_entry(name) is None and _config_path(name) is None and not _HUB_ID.fullmatch(name):
        raise _unknown(name)
    require(*PLANS)


def _key(name: str) -> str:
    """Fold `name` for comparison. A separator between two digits stays, so 3-18 is not 31-8.

    >>> _key("Open_LLaMA-7B"), _key("llama-2-7b")
    ('openllama7b', 'llama2-7b')
    """
    hyphenated = re.sub(r"[-_ ]+", "-", name.strip().casefold())
    return re.sub(r"(?<![0-9])-|-(?![0-9])", "", hyphenated)


@cache
def _entries() -> dict[str, ModelEntry]:
    entries = {}
    for path in sorted(CONFIG_DIR.glob("*.json")):
        data = _read_json(path)
        del data["config"]
        data |= {"name": path.stem, "aliases": tuple(data["aliases"])}
        entries[path.stem] = ModelEntry(**data)
    return entries


@cache
def _entries_by_key() -> dict[str, ModelEntry]:
    """Return {name folded by `_key`: bundled model} for every name; no two models share a name."""
    by_key: dict[str, ModelEntry] = {}
    for entry in _entries().values():
        for name in (entry.name, entry.hub_id, *entry.aliases):
            owner = by_key.setdefault(_key(name), entry)
            assert owner is entry, f"{name} names both {owner.name} and {entry.name}"
    return by_key


def _unknown(name: str) -> UnknownModelError:
    # three models of many matches, since several spellings of one model would crowd the hint
    candidates = [alias for e in _entries().values() for alias in (e.name, e.hub_id, *e.aliases)]
    nearest = [find_entry(match) for match in closest(name, candidates, num=12)]
    names = list(dict.fromkeys(entry.name for entry in nearest if entry is not None))[:3]
    near = f"closest: {', '.join(f'`{n}`' for n in names)}; " if names else ""
    return UnknownModelError(
        f"`{name[:200]}` is no bundled model, no path of a config.json and no Hub id",
        hint=f"{near}`memest models` lists all",
    )


def _config_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                if _HUB_ID.fullmatch(name):
                    return None
                raise PlanError(
                    f"the folder `{name}` has no config.json",
                    hint="point at the folder of a transformers model, or at its config.json",
                )
            return path / "config.json"
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError):
        # A name that cannot be a path (too long, a null byte, an unknown `~user`) has no config.
        return None
    if name.endswith(".json") or name.startswith(("/", "./", "../", "~")):
        raise PlanError(f"there is no file `{name}`", hint="give the path of a config.json")
    return None


def _read_json(path: Path) -> Any:
    """Return the JSON value in the file `path`; every fault of the file is a `PlanError`."""
    text = read_limited(path, MAX_CONFIG_BYTES, what="a transformers model: its config.json")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "give the config.json of a transformers model"
        raise PlanError(f"`{path}` is not JSON: {error_text(error)}", hint=hint) from error


def _download_config(hub_id: str) -> Path:
    """Download only config.json of the Hub repository `hub_id`; return its local path."""
    from huggingface_hub import errors, hf_hub_download

    remedy = "give a bundled name, or the path of a config.json that you have"
    try:
        return Path(
            hf_hub_download(hub_id, "config.json", local_files_only=not _hub_is_reachable(hub_id))
        )
    except errors.GatedRepoError as error:
        hint = f"accept its terms on the Hub and log in with `hf auth login`, or {remedy}"
        raise UnknownModelError(f"`{hub_id}` is gated on the Hub", hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        message = f"the Hub has no public model `{hub_id}`"
        raise UnknownModelError(message, hint=_unknown(hub_id).hint) from error
    except errors.LocalEntryNotFoundError as error:
        raise UnknownModelError(
            f"`{hub_id}` is not bundled, and the Hub cannot be reached",
            hint=f"{_unknown(hub_id).hint}; or {remedy}",
        ) from error
    except errors.EntryNotFoundError as error:
        raise UnknownModelError(f"`{hub_id}` has no config.json on the Hub", hint=remedy) from error
    except Exception as error:  # all errors of the client's transport mean the same
        raise UnknownModelError(
            f"the config.json of `{hub_id}` cannot be downloaded: {error_text(error)}", hint=remedy
        ) from error


def _hub_is_reachable(hub_id: str) -> bool:
    """Return whether the Hub answers for `hub_id` within 5 s; its own client retries for 30 s."""
    from huggingface_hub import get_session, hf_hub_url

    try:
        get_session().head(hf_hub_url(hub_id, "config.json"), timeout=5.0)
    except Exception:  # offline mode, no route, no name, a timeout: all mean the same
        return False
    return True


def dtype_keyword() -> str:
    """Return transformers' keyword for the dtype: `dtype`, or `torch_dtype` before 4.56."""
    from transformers import PretrainedConfig

    return "dtype" if hasattr(PretrainedConfig, "dtype") else "torch_dtype"


def error_text(error: BaseException) -> str:
    """Return the text of `error` as a line of up to 200 characters, or its type if it has none."""
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide warnings and progress bars of transformers in a `with` block; memest reports instead."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def parse_config(
    raw: object, *, name: str, source: str = "", entry: ModelEntry | None = None,
    remote_from: str = "",
) -> ModelConfig:  # fmt: skip
    """Return a `ModelConfig` made from `raw`, the content of a config.json, after checks. The
    result has the fields `name`, `source` and `entry`; errors have `name` too. `source` is
    `bundled`, the path of the file, or `hub:org/name`. `remote_from` is the folder or Hub id whose
    code may run; "" allows none."""
    if not isinstance(raw, dict):
        kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
        raise PlanError(
            f"the config of `{name}` is a JSON {kinds.get(type(raw), 'null')}, not an object",
            hint="give the config.json of a transformers model",
        )
    _check_counts(raw, name)
    if raw.get("quantization_config"):
        raise UnsupportedError(
            f"`{name}` is a quantised checkpoint (`quantization_config` in its config)",
            hint="give the unquantised model; `use_qlora` quantises it",
        )
    if raw.get("auto_map"):
        if not remote_from:
            raise UnsupportedError(
                f"the config of `{name}` names code of its own (`auto_map`)",
                hint="`trust_remote_code` runs it; without `auto_map` transformers' class is used",
            )
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(remote_from, trust_remote_code=True)
        except Exception as error:  # foreign code may raise anything
            raise MemestError(
                f"the code of `{remote_from}` failed: {error_text(error)}",
                hint="memest can only run code that the installed transformers accepts",
            ) from error
        return ModelConfig(
            name=name, source=source, pretrained=config, architecture="", remote_code=remote_from
        )
    names = raw.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(item, str) for item in names)
    ):
        raise PlanError(
            f"`architectures` of `{name}` is {str(names)[:80]!r}, not a list of class names",
            hint='write it as ["LlamaForCausalLM"]',
        )
    pretrained = _to_pretrained(raw, name)
    return ModelConfig(
        name=name, source=source, pretrained=pretrained,
        architecture=_architecture(raw, pretrained, name), entry=entry,
    )  # fmt: skip


def _numbers(value: object) -> Iterator[tuple[str, int | float]]:
    """Yield (innermost key or "", number) for each number in the JSON `value`, however deep."""
    stack: list[tuple[str, object]] = [("", value)]
    while stack:
        key, item = stack.pop()
        if isinstance(item, dict):
            stack.extend((str(inner_key), inner) for inner_key, inner in item.items())
        elif isinstance(item, list):
            stack.extend((key, inner) for inner in item)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield key, item


def _check_counts(raw: Mapping[str, Any], name: str) -> None:
    """Raise a `PlanError` if a count in config `raw`, such as of layers, is over `COUNT_LIMITS`."""
    for key, value in _numbers(raw):
        for pattern, limit in COUNT_LIMITS.items():
            if pattern.search(key.casefold()) and value > limit:
                text = str(value) if value < 10**12 else "beyond any model"
                raise PlanError(
                    f"`{key}` in the config of `{name}` is {text}",
                    hint=f"the largest that memest builds is {limit}",
                )


def _to_pretrained(raw: dict[str, Any], name: str) -> "PretrainedConfig":
    """Return the transformers config made of `raw`, by its `model_type`; `name` is for errors."""
    from transformers import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        fault = "lacks `model_type`" if model_type is None else f"has `model_type` {model_type!r}"
        raise PlanError(
            f"the config of `{name}` {fault}", hint='name the family, such as "model_type": "llama"'
        )
    if model_type not in CONFIG_MAPPING:
        near = ", ".join(f"`{match}`" for match in closest(model_type, CONFIG_MAPPING.keys()))
        raise PlanError(
            f"`model_type` `{model_type}` of `{name}` is not known to the installed transformers",
            hint=f"closest: {near}" if near else "a newer transformers may know it",
        )
    try:
        with quiet_transformers():
            config = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(raw)))
    except Exception as error:  # a config class may raise anything on an unexpected value
        raise PlanError(
            f"transformers cannot read the config of `{name}`: {error_text(error)}",
            hint=f"compare it with a config.json of a published `{model_type}` model",
        ) from error
    return config


def _architecture(raw: Mapping[str, Any], config: "PretrainedConfig", name: str) -> str:
    """Return the first class name in `architectures` of `raw`; "" if there is none. `PlanError`,
    with `name`, if transformers has no such model class, or if it does not take `config`."""
    import transformers

    names = raw.get("architectures")
    if not names:
        return ""
    cls = getattr(transformers, names[0], None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        class_names = [n for n in dir(transformers) if _MODEL_CLASS.search(n)]
        near = ", ".join(f"`{n}`" for n in closest(names[0], class_names))
        raise PlanError(
            f"`architectures` of `{name}` names `{names[0]}`, "
            "which is no model class of the installed transformers",
            hint=f"closest: {near}" if near else "a newer transformers may have it",
        )
    if cls.config_class is None or not isinstance(config, cls.config_class):
        raise PlanError(
            f"`architectures` of `{name}` names `{names[0]}`, "
            f"which does not take a `{config.model_type}` config",
            hint="`model_type` and `architectures` must be of one family",
        )
    return str(names[0])

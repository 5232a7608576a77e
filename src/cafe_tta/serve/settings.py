"""Settings of the server. Each is declared once: the field is the flag, the TOML key, the variable and the check.

A value comes from its default, a TOML file, the environment or a flag; the later of these wins. Those that are declared
with `process=True` belong to the server; the others belong to a model, of which a server may have several.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cafe_tta.methods.choice import MethodOptions
from cafe_tta.models import ModelOptions
from cafe_tta.models.names import NAMES
from cafe_tta.options import NONE_WORDS, Described, combine, describe, did_you_mean, option
from cafe_tta.source.reference import MARGIN

PREFIX = "CAFE_TTA_SERVE_"
MEBIBYTE = 2**20

_MODEL, _ADAPTING, _JUDGE, _STATE = "Model", "Adapting", "Judging every step", "Keeping the adapted model"
_TRUST = "Which cameras are trusted"
_LEADER = "Several servers that adapt as one"
_NETWORK, _QUEUE = "The network", "Batches and the queue (Triton's names)"
_LIMITS, _LOG = "Limits", "Logging and metrics"


@dataclass(frozen=True)
class Settings(MethodOptions, ModelOptions):
    """Settings of the service and of its HTTP server.

    >>> Settings(step_images=1)
    Traceback (most recent call last):
    ValueError: expected `step_images` to be at least 2, but got 1
    """

    model: str | Path | None = option(  # type: ignore[assignment]
        None,
        f"The model: {NAMES}; or a file that `cafe-tta train` made. By default the embedded digits.",
        panel=_MODEL,
        metavar="MODEL",
    )
    name: str | None = option(
        None,
        "Name of the model in the server's addresses. The name of its file or architecture if not given.",
        panel=_MODEL,
        pattern=(r"[\w.-]{1,100}", "letters, digits, and . _ -"),
    )

    adapt: bool = option(True, "Adapt the model; otherwise the source model answers, unchanged.", panel=_ADAPTING)
    step_images: int = option(256, "Number of new images that an adaptation step takes.", panel=_ADAPTING, least=2)
    buffer_images: int = option(
        1024, "Number of images of all cameras together that the buffer keeps for the next steps.", panel=_ADAPTING
    )
    per_camera: int | None = option(
        # A quarter of a camera's images validates snapshots, which takes 16 images at least.
        None,
        "Number of images of one camera that the buffer keeps. An equal share of it if not given.",
        panel=_ADAPTING,
        least=64,
    )
    max_cameras: int = option(
        1024, "Number of cameras to remember; the one that was silent longest is forgotten.", panel=_ADAPTING, least=1
    )
    adapt_share: float = option(
        0.5, "Largest share of the time spent adapting while images keep coming.", panel=_ADAPTING, above=0, most=1
    )
    gate: bool = option(True, "Take no step while the images look like the source.", panel=_ADAPTING)
    gate_margin: float = option(
        MARGIN,
        "Factor by which the alignment loss may exceed the largest one of source batches and still look like the "
        "source.",
        panel=_ADAPTING,
        above=0,
    )
    seed: int = option(0, "Seed of the random draws from the buffer.", panel=_ADAPTING, least=0)

    camera_tokens: Path | None = option(
        None,
        'TOML file of cameras\' tokens, gate-1 = "token"; their images need one. Read again when it changes.',
        panel=_TRUST,
    )
    unknown_cameras: Literal["share", "answer", "refuse"] = option(
        "share",
        "With camera_tokens, what becomes of cameras without one: share, that all of them count as one camera; answer, "
        "that nothing is adapted to them; refuse.",
        panel=_TRUST,
    )

    judge: bool = option(
        True,
        "Judge every snapshot before and after it is published, and quarantine degenerate cameras.",
        panel=_JUDGE,
        aliases=("guard",),
    )
    validation_images: int = option(
        128,
        "Number of validation images, never adapted to, that a snapshot is judged on.",
        panel=_JUDGE,
        least=16,
        aliases=("held_images",),
    )

    state: Path | None = option(
        None, "Folder to save the adapted model in. Nothing is saved if not given.", panel=_STATE
    )
    save_every: float = option(60.0, "Seconds between two saves of the adapted model.", panel=_STATE, above=0)
    history: int = option(
        16, "Number of snapshots to keep for rolling back, in memory and on disk.", panel=_STATE, least=1
    )
    history_megabytes: float = option(512.0, "Memory limit for kept snapshots, in MB.", panel=_STATE, above=0)

    leader: str | None = option(
        None,
        "Address of another server that adapts for this one: its snapshots answer here, images to adapt to are sent to "
        "it. Needs its token.",
        panel=_LEADER,
        metavar="URL",
        pattern=(r"https?://[^\s/?#@]+(/[^\s?#]*)?", "an address such as http://10.0.0.1:8080"),
    )

    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 is every network of this machine.", panel=_NETWORK, process=True
    )
    port: int = option(
        8080, "Port to listen on; 0 takes a free one.", panel=_NETWORK, process=True, least=0, most=65535
    )
    grpc_port: int | None = option(
        None,
        "Port of the Open Inference Protocol's gRPC service; 0 takes a free one. None if not given.",
        panel=_NETWORK,
        process=True,
        least=0,
        most=65535,
    )
    token: str | None = option(
        None,
        "Bearer token that the controls ask for. Prefer the environment or the file: flags are visible to other users.",
        panel=_NETWORK,
        process=True,
        pattern=(r"[!-~]{8,1000}", "a token of at least 8 printable characters without spaces"),
        secret=True,
    )
    drain_seconds: float = option(
        5.0,
        "Seconds to go on answering waiting requests when stopped.",
        panel=_NETWORK,
        process=True,
        least=0,
        most=600,
    )

    max_batch_size: int = option(
        128, "Largest number of images in a batch, and in one request.", panel=_QUEUE, least=1, most=65536
    )
    max_queue_delay_microseconds: int = option(
        1000, "Longest wait of an image for others to share its batch.", panel=_QUEUE, least=0, most=60_000_000
    )
    max_queue_size: int = option(
        1024, "Largest number of waiting images; further requests get 429 with Retry-After.", panel=_QUEUE, least=1
    )
    default_timeout_microseconds: int = option(
        30_000_000, "Longest wait of a request in the queue.", panel=_QUEUE, least=1000, most=3_600_000_000
    )
    allow_timeout_override: bool = option(True, "Let requests ask for a shorter time-out.", panel=_QUEUE)
    timeout_action: Literal["reject", "delay"] = option(
        "reject", "What happens after the time-out: reject (504), or delay behind the others.", panel=_QUEUE
    )

    max_body_bytes: int = option(
        64 * MEBIBYTE, "Size limit of a request, before and after decompression.", panel=_LIMITS, least=1024
    )
    max_json_bytes: int = option(16 * MEBIBYTE, "Size limit of the JSON part of a request.", panel=_LIMITS, least=1024)
    max_pending_bytes: int = option(
        512 * MEBIBYTE, "Memory limit of all requests at once; beyond it, 429.", panel=_LIMITS, process=True, least=1024
    )
    max_image_pixels: int = option(
        25_000_000, "Largest number of pixels of an image, checked before it is decoded.", panel=_LIMITS, least=1
    )
    max_grpc_bytes: int = option(
        4 * MEBIBYTE,
        "Size limit of a gRPC request; max_pending_bytes divided by it is the largest number of such requests at once.",
        panel=_LIMITS,
        process=True,
        least=1024,
    )
    body_timeout_seconds: float = option(
        20.0, "Seconds in which a request must arrive; otherwise 408.", panel=_LIMITS, process=True, above=0
    )
    decode_threads: int = option(
        2, "Number of threads that decode and preprocess images.", panel=_LIMITS, least=1, most=64
    )

    metrics_cameras: int = option(
        20, "Number of cameras that the metrics may name; 0 names none.", panel=_LOG, least=0, most=1000
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least severe messages to log.", panel=_LOG, process=True
    )
    log_format: Literal["text", "json"] = option("text", "How log lines are written.", panel=_LOG, process=True)
    access_log: bool = option(False, "Log a line for every request.", panel=_LOG, process=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.leader is not None and self.token is None:
            raise ValueError("expected `token` with `leader`: that of the leader, which all of its followers share")
        wanted = self.step_images + self.validation_images
        self._require_least("buffer_images", wanted, f"`step_images` + `validation_images` = {wanted}")
        self._require_least("max_queue_size", self.max_batch_size, f"`max_batch_size` = {self.max_batch_size}")
        self._require_least("max_pending_bytes", self.max_body_bytes, f"`max_body_bytes` = {self.max_body_bytes}")
        self._require_least("max_pending_bytes", self.max_grpc_bytes, f"`max_grpc_bytes` = {self.max_grpc_bytes}")

    def _require_least(self, name: str, least: int, words: str) -> None:
        if getattr(self, name) < least:
            raise ValueError(f"expected `{name}` to be at least {words}, but got {getattr(self, name)}")


def load_settings(flags: Mapping[str, Any], config: Path | None = None, kind: type[Settings] = Settings) -> Settings:
    """The settings that a TOML file, the environment and flags (those that are not None) make together."""
    first, *others = load_models(flags, config, kind)
    if others:
        names = ", ".join(str(settings.name) for settings in (first, *others))
        raise ValueError(f"expected the settings of one model, but {config} has {len(others) + 1}: {names}")
    return first


def load_models(
    flags: Mapping[str, Any], config: Path | None = None, kind: type[Settings] = Settings
) -> list[Settings]:
    """The settings of each model: of every table `[models.NAME]` of the file, or of the one model of a file without.

    What stands outside of the tables, in the environment and in flags holds for all models, except that each has the
    folder of its name in a `state` that is given there.
    """
    known = {name: described for described in describe(kind) for name in described.names}
    values = {} if config is None else _read_file(config)
    tables = values.pop("models", None)
    common = [list(_from_table(values, str(config), known)), list(_from_environment(known)), list(_from_flags(flags))]
    if tables is None:
        return [combine(kind, *common)]
    if not isinstance(tables, dict) or not tables:
        raise ValueError(f"expected tables [models.NAME] in {config}, one for each model, but got {tables!r:.80}")
    if place := next((place for layer in common for name, _, place in layer if name == "name"), None):
        raise ValueError(f"expected no `name` beside [models.NAME] in {config}: the table says it ({place})")
    found = [combine(kind, *_layers(name, table, config, known, common)) for name, table in tables.items()]
    _require_own_states(found)
    return found


def of_model(settings: Settings) -> dict[str, Any]:
    """The settings that belong to the model, not to the process of the server."""
    described = (described for described in describe(Settings) if not described.extra.get("process"))
    return {each.name: getattr(settings, each.name) for each in described}


Given = tuple[str, Any, str]  # name, value, and where it was given, in words
Known = Mapping[str, Described]


def _layers(
    name: str, table: Any, config: Path | None, known: Known, common: Sequence[Sequence[Given]]
) -> list[list[Given]]:
    """What is given for one model: outside of its table, in it, in the environment and in flags."""
    where = f"[models.{name}] of {config}"
    if not isinstance(table, dict):
        raise ValueError(f"expected {where} to be a table of settings, but got {table!r:.80}")
    own = [("name", name, where), *_from_table(table, where, known)]
    for setting, _, _ in own[1:]:
        if setting == "name":
            raise ValueError(f"expected no `name` in {where}: the heading of the table says it")
        if known[setting].extra.get("process"):
            raise ValueError(f"expected `{setting}` outside of {where}: it belongs to the server, not to one model")
    file, *others = ([_beneath(given, name) for given in layer] for layer in common)
    return [file, own, *others]


def _beneath(given: Given, model: str) -> Given:
    """A value that is given for all models, as one of them has it: `state` is a folder of folders."""
    name, value, place = given
    if name != "state" or str(value).lower() in NONE_WORDS:
        return given
    return name, Path(value) / model if isinstance(value, (str, Path)) else value, place


def _require_own_states(models: Sequence[Settings]) -> None:
    owners: dict[Path, str | None] = {}
    for settings in models:
        folder = None if settings.state is None else Path(settings.state).resolve()
        if folder in owners:
            both = f"{owners[folder]} and {settings.name}"
            raise ValueError(f"expected a folder of its own for the `state` of every model, but {both} share {folder}")
        if folder is not None:
            owners[folder] = settings.name


def _read_file(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is not a TOML file: {error}") from None


def _from_table(values: Mapping[str, Any], where: str, known: Known) -> Iterator[Given]:
    for name, value in values.items():
        if name not in known:
            raise ValueError(_unknown(f"{name!r} in {where}", did_you_mean(name, known)))
        if isinstance(value, dict):
            raise ValueError(f"expected {name} in {where} to be a value, but got a table; see cafe-tta serve --help")
        yield name, value, where


def _from_environment(known: Known) -> Iterator[Given]:
    variables = {f"{PREFIX}{name.upper()}": name for name in known}
    for variable, value in os.environ.items():
        if not variable.upper().startswith(PREFIX):
            continue
        if variable.upper() not in variables:
            raise ValueError(_unknown(f"{variable} in the environment", did_you_mean(variable.upper(), variables)))
        if value:
            yield variables[variable.upper()], value, variable


def _from_flags(flags: Mapping[str, Any]) -> Iterator[Given]:
    return ((name, value, f"--{name.replace('_', '-')}") for name, value in flags.items() if value is not None)


def _unknown(what: str, hint: str) -> str:
    return f"no setting {what}{hint}; see cafe-tta serve --help"

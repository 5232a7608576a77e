"""Settings of the server: from a TOML file, from the environment, from flags; later ones win."""

import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from cafe_tta.serve.config import ServiceConfig

PREFIX = "CAFE_TTA_SERVE_"
MEBIBYTE = 2**20


def _setting(panel: str, default: Any, text: str, **limits: Any) -> Any:
    return Field(default, description=text, json_schema_extra={"panel": panel}, **limits)


_MODEL, _METHOD, _NET = "The model", "Adapting", "The network"
_QUEUE, _LIMITS, _LOG = "Batches and the queue (Triton's names)", "Limits", "Logging"
_OF_SERVICE = {field: getattr(ServiceConfig(), field) for field in ServiceConfig.__dataclass_fields__}


class Settings(BaseSettings):
    """What `cafe-tta serve` can be told. A key of the TOML file, CAFE_TTA_SERVE_<NAME> and a flag for each."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    model: str | None = _setting(
        _MODEL, None, "As in the other commands; without it, the embedded digits model is served."
    )
    weights: str | None = _setting(_MODEL, None, "File of weights for the model.")
    num_classes: int | None = _setting(_MODEL, None, "Number of classes.", ge=1)
    pretrained: bool = _setting(_MODEL, False, "Download the library's weights.")
    image_size: int | None = _setting(_MODEL, None, "Pixels that the model reads, in each direction.", ge=1)
    mean: str | None = _setting(_MODEL, None, "Of the RGB values in 0..1: three numbers, r,g,b.")
    std: str | None = _setting(_MODEL, None, "As mean.")
    head: str | None = _setting(_MODEL, None, "Name of the linear layer that makes the logits; found by itself.")
    device: str = _setting(_MODEL, "auto", "One of auto, cpu, cuda, mps.")
    name: str | None = _setting(
        _MODEL, None, "What clients call the model; else the name of its file, or digits.", pattern=r"^[\w.-]{1,100}$"
    )

    stats: Path | None = _setting(_METHOD, None, "The model's statistics, of `cafe-tta stats`.")
    histograms: Path | None = _setting(_METHOD, None, "What `fr` needs.")
    posterior: Path | None = _setting(_METHOD, None, "What `bacs` needs.")
    method: str = _setting(_METHOD, "cafe", "See `cafe-tta methods`.")
    preset: str | None = _setting(_METHOD, None, "A set of options by name.")
    set: Annotated[list[str], NoDecode] = _setting(
        _METHOD, [], "Options of the method, such as lr=0.01; the flag may be repeated."
    )
    adapt: bool = _setting(_METHOD, _OF_SERVICE["adapt"], "Adapt at all.")
    step_images: int = _setting(_METHOD, _OF_SERVICE["step_images"], "Images that one step of adapting takes.")
    buffer_images: int = _setting(_METHOD, _OF_SERVICE["buffer_images"], "Images that wait for it at most.")
    per_camera: int | None = _setting(
        _METHOD, _OF_SERVICE["per_camera"], "Images of one camera that wait at most; else an equal share."
    )
    max_cameras: int = _setting(_METHOD, _OF_SERVICE["max_cameras"], "Cameras that are remembered.")
    held_images: int = _setting(
        _METHOD, _OF_SERVICE["held_images"], "Images, never adapted to, that a step is judged on."
    )
    adapt_share: float = _setting(
        _METHOD, _OF_SERVICE["adapt_share"], "Of the time that adapting may take while images keep coming."
    )
    guard: bool = _setting(_METHOD, _OF_SERVICE["guard"], "Judge every step, and take back what does harm.")
    gate: bool = _setting(_METHOD, _OF_SERVICE["gate"], "No step while the images look like the source.")
    gate_margin: float = _setting(
        _METHOD, _OF_SERVICE["gate_margin"], "How far above source batches images still look like the source."
    )
    state: Path | None = _setting(_METHOD, _OF_SERVICE["state"], "Folder where the adapted state is kept.")
    save_every: float = _setting(_METHOD, _OF_SERVICE["save_every"], "Seconds between two saved states.")
    history: int = _setting(_METHOD, _OF_SERVICE["history"], "States that are kept to roll back to.")
    history_megabytes: float = _setting(_METHOD, _OF_SERVICE["history_megabytes"], "Memory that they may take.")
    seed: int = _setting(_METHOD, _OF_SERVICE["seed"], "Of the draws of images.", ge=0)

    host: str = _setting(_NET, "127.0.0.1", "Address to listen on. 0.0.0.0 is every network of this machine.")
    port: int = _setting(_NET, 8080, "Port; 0 takes a free one.", ge=0, le=65535)
    token: SecretStr | None = _setting(
        _NET, None, "Bearer token that pause, resume, reset, rollback and save need. Better not as a flag."
    )
    drain_seconds: float = _setting(
        _NET, 5.0, "When stopped, how long waiting requests may still be answered.", ge=0, le=600
    )

    max_batch_size: int = _setting(
        _QUEUE, 128, "Images that the model answers at once, and that one request may have.", ge=1, le=65536
    )
    max_queue_delay_microseconds: int = _setting(
        _QUEUE, 1000, "How long an image waits for others to share its batch.", ge=0, le=60_000_000
    )
    max_queue_size: int = _setting(_QUEUE, 1024, "Images that wait at most; beyond, 429 with Retry-After.", ge=1)
    default_timeout_microseconds: int = _setting(
        _QUEUE, 30_000_000, "How long a request may wait in the queue.", ge=1000, le=3_600_000_000
    )
    allow_timeout_override: bool = _setting(_QUEUE, True, "Requests may ask for a shorter time-out.")
    timeout_action: Literal["reject", "delay"] = _setting(
        _QUEUE, "reject", "After the time-out: reject (504), or delay behind the others."
    )

    max_body_bytes: int = _setting(_LIMITS, 64 * MEBIBYTE, "Of a request, also after unpacking.", ge=1024)
    max_json_bytes: int = _setting(_LIMITS, 16 * MEBIBYTE, "Of its JSON part.", ge=1024)
    max_pending_bytes: int = _setting(_LIMITS, 512 * MEBIBYTE, "Of all requests at once; beyond, 429.", ge=1024)
    max_image_pixels: int = _setting(_LIMITS, 25_000_000, "Of one image, checked before it is decoded.", ge=1)
    body_timeout_seconds: float = _setting(_LIMITS, 20.0, "In which a request must have arrived; else 408.", gt=0)
    decode_threads: int = _setting(_LIMITS, 2, "Threads that decode and prepare images.", ge=1, le=64)

    log_level: Literal["debug", "info", "warning", "error"] = _setting(_LOG, "info", "What is worth a line.")
    access_log: bool = _setting(_LOG, False, "A line for every request.")

    @field_validator("set", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """From the environment: `lr=0.01,steps=2`."""
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        text = value.get_secret_value() if value else None
        if text is not None and not re.fullmatch(r"[!-~]{8,1000}", text):
            raise ValueError("a token of at least 8 printable characters without spaces")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "Settings":
        if self.max_queue_size < self.max_batch_size:
            raise ValueError(f"max_queue_size to be at least max_batch_size ({self.max_batch_size})")
        if self.max_pending_bytes < self.max_body_bytes:
            raise ValueError(f"max_pending_bytes to be at least max_body_bytes ({self.max_body_bytes})")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    def service_config(self, name: str) -> ServiceConfig:
        """The settings that are the service's own."""
        ours = {field: getattr(self, field) for field in _OF_SERVICE if field != "name"}
        return ServiceConfig(name=name, **ours)


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """The settings that a file, the environment and flags (those that are not None) make together."""
    flags = {name: value for name, value in flags.items() if value is not None}
    from_file = {} if config is None else _read(config)
    known = Settings.model_fields
    for variable in os.environ:
        if variable.upper().startswith(PREFIX) and variable[len(PREFIX) :].lower() not in known:
            raise ValueError(_unknown(f"{variable} in the environment", variable[len(PREFIX) :].lower(), PREFIX))
    in_environment = {name for name in known if os.environ.get(f"{PREFIX}{name.upper()}")}
    # The environment is read by pydantic-settings, and must win over the file: what it names is left out of that.
    from_file = {name: value for name, value in from_file.items() if name not in in_environment}
    try:
        return Settings(**(from_file | flags))
    except ValidationError as error:
        places = {name: f"{config}" for name in from_file}
        places |= {name: f"{PREFIX}{name.upper()}" for name in in_environment}
        places |= {name: f"--{name.replace('_', '-')}" for name in flags}
        raise ValueError("; ".join(_told(dict(found), places) for found in error.errors())) from None


def _read(config: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(config.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is not a TOML file: {error}") from None
    for name, value in found.items():
        if name not in Settings.model_fields:
            raise ValueError(_unknown(f"{name!r} in {config}", name))
        if isinstance(value, dict):
            raise ValueError(f"expected {name} in {config} to be a value, but got a table; see cafe-tta serve --help")
    return found


def _unknown(what: str, name: str, prefix: str = "") -> str:
    near = get_close_matches(name, list(Settings.model_fields), n=1)
    shown = (prefix + near[0].upper() if prefix else near[0]) if near else ""
    return f"no setting {what}{f'; did you mean {shown!r}?' if shown else ''}; see cafe-tta serve --help"


_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "list_type": "a list of texts",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "letters, digits, and . _ -",
}


def _told(found: Mapping[str, Any], places: Mapping[str, str]) -> str:
    name = str(found["loc"][0]) if found["loc"] else ""
    if found["type"] == "value_error":
        expected = str(found["ctx"]["error"])
        if not name:
            return f"expected {expected}"
    else:
        words = _EXPECTED.get(found["type"], "")
        expected = words.format(**found.get("ctx", {})) if words else f"otherwise ({found['msg']})"
    got = "" if name == "token" else f", but got {found['input']!r}"
    return f"expected {name} to be {expected}{got} ({places.get(name, 'default')})"

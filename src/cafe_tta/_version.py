"""The version of this package, for whoever writes it down."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("cafe-tta")
except PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0.0.0"

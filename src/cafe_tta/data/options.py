"""The options that describe a set of images."""

from dataclasses import dataclass

from cafe_tta.options import Options, option

DATA_HELP = (
    "The images: a folder, an image file, a pattern in quotes such as 'photos/*.jpg', or a data set such as "
    "digits:test, cifar10:test or arrays:DIR."
)


@dataclass(frozen=True)
class DataOptions(Options):
    """Which images are read, and how.

    >>> DataOptions("digits:test").workers
    0
    """

    data: str = option("", DATA_HELP, required=True)
    workers: int = option(0, "Number of threads that read images ahead.", least=0)

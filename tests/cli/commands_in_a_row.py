"""Started by torchrun: runs several commands of cafe-tta in each rank, one after the other. Starting takes the time."""

import json
import sys

from cafe_tta.cli import app


def main() -> None:
    for arguments in json.loads(sys.argv[1]):
        try:
            app(arguments)
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main()

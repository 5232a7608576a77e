"""`python -m cafe_tta` is the command `cafe-tta`."""

import sys


def main() -> None:
    """Runs the command line, or says what it lacks."""
    try:
        _main()
    except KeyboardInterrupt:  # before the command line could look after it: while it was imported
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _main() -> None:
    try:
        from cafe_tta.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "PIL"):
            raise
        from cafe_tta._install import missing

        sys.exit(f"error: {missing('the command line', error, 'cli')}")
    run()


if __name__ == "__main__":
    main()

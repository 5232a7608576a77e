"""The command line: the only place that prints. `cafe-tta --help` tells what there is."""

from cafe_tta.cli.app import app as app
from cafe_tta.cli.app import main as main

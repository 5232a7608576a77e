"""`cafe-tta corrupt`: corrupted copies of images, in the published layouts."""

import time
from pathlib import Path
from typing import Annotated

import typer

from cafe_tta import copies, data
from cafe_tta._install import command as install_command
from cafe_tta.cli.console import Interrupted, StopRequest, counted, progress, say, say_unreadable, show_facts
from cafe_tta.cli.flags import command
from cafe_tta.data.options import DATA_HELP


@command()
def corrupt(
    options: copies.CopyOptions,
    data_spec: Annotated[str, typer.Option("--data", help=DATA_HELP, show_default=False)],
    output: Annotated[Path, typer.Option(help="Folder for the copies.", show_default=False)],
    workers: Annotated[int, typer.Option(min=1, help="Number of processes. The copies do not depend on it.")] = 1,
    contact_sheet: Annotated[
        bool, typer.Option("--contact-sheet/--no-contact-sheet", help="Draw contact-sheet.png.")
    ] = True,
    download: Annotated[bool, typer.Option("--download", help="Download the data set if it is missing.")] = False,
) -> None:
    """Make corrupted copies of images: 15 corruptions and 4 more, at 5 severities.

    cafe-tta corrupt --data photos --output photos-c --severity 5

    Arrays, such as cifar10:test, are stored as CIFAR-10-C is: read all of them with cifar10-c@DIR (for `bench`), and one corruption with cifar10-c:fog-5@DIR (for `adapt`). The same command continues a run that was stopped.
    """  # noqa: E501 - a line break here would be one in the help
    began = time.perf_counter()
    imageset = data.load(data_spec, download=download)
    say_unreadable(data.left_out(imageset))
    with progress("looking", len(imageset)) as advance:
        job = copies.plan(imageset, output, options, name=data_spec, advance=advance)
    if job.settings.frost == copies.PROCEDURAL_FROST:
        say(
            f"note: frost is made with {copies.PROCEDURAL_FROST}; "
            f"the published ones come with: {install_command('corruptions')}"
        )
    made = 0
    with StopRequest() as stop, progress("corrupting", job.total) as advance:

        def count(amount: int) -> None:
            nonlocal made
            made += amount
            advance(amount)
            if stop.signal_number and made < job.total:
                text = f"{made} of {counted(job.total, 'copy', 'copies')} made; the same command goes on"
                raise Interrupted(text, stop.signal_number)

        finished = copies.carry_out(job, workers=workers, contact_sheet=contact_sheet, advance=count)
    _show(finished, job.total, time.perf_counter() - began)


def _show(made: copies.Copies, total: int, seconds: float) -> None:
    settings, output = made.settings, made.output
    severities = ", ".join(map(str, settings.severities))
    facts = [
        ("images", f"{settings.images}, of {settings.data}"),
        ("copies", f"{total}: {counted(len(settings.corruptions), 'corruption')}, severity {severities}"),
        ("parameters", f"preset {settings.preset}, seed {settings.seed}"),
    ]
    if made.left_out:
        say_unreadable(list(made.left_out))
        facts.append(("left out", f"{counted(len(made.left_out), 'image')}, {output / 'left-out.txt'}"))
    if made.contact_sheet is not None:
        facts.append(("picture", str(made.contact_sheet)))
    if settings.frost:
        facts.append(("frost", settings.frost))
    facts.append(("time", f"{seconds:.1f} s"))
    domain = f"{settings.corruptions[0]}-{settings.severities[-1]}"
    read = {
        "folder": "",
        "arrays": f"; read them with arrays:{output}/{domain}",
        "cifar-c": f"; read them with cifar10-c@{output}, or one domain with cifar10-c:{domain}@{output}",
    }
    facts.append(("written", f"{output}{read[settings.layout]}"))
    show_facts(facts)

"""`cafe-tta corrupt`: corrupted copies of images, in the published layouts."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import cafe_tta
from cafe_tta import corruptions, data, storage
from cafe_tta.cli.console import Interrupted, StopRequest, counted, progress, say, show_facts
from cafe_tta.cli.inputs import say_unreadable
from cafe_tta.data import copies
from cafe_tta.options import did_you_mean

GROUPS = {"all": corruptions.NAMES, "held-out": corruptions.HELD_OUT}
LAYOUTS = ("auto", *copies.LAYOUTS)


def corrupt(
    data_spec: Annotated[
        str,
        typer.Option(
            "--data",
            help="A folder of images, arrays:DIR, digits:test, cifar10:test, imagenet:val …",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the copies.", show_default=False)],
    names: Annotated[
        str, typer.Option("--corruptions", help="all (the 15), held-out (the other 4), or names: fog,snow.")
    ] = "all",
    severity: Annotated[
        list[str] | None, typer.Option(help="1 to 5; several: 3,5 or 1-3. By default all.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Parameters: {', '.join(corruptions.PRESETS)}. By default those for the images' size: cifar up to 40 "
            "pixels, tinyimagenet up to 100, else imagenet.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the corruptions, and of --limit.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Copy only so many images, drawn at random.", show_default=False)
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="folder: image files, as ImageNet-C. cifar-c: one array for each corruption, as CIFAR-10-C. arrays: "
            "one for each corruption and severity. auto: folder for image files, cifar-c for arrays."
        ),
    ] = "auto",
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Of image files: png (default), or jpg of quality 85, as the published ImageNet-C.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes. The copies do not depend on their number.")] = 1,
    contact_sheet: Annotated[
        bool, typer.Option("--contact-sheet/--no-contact-sheet", help="Draw contact-sheet.png.")
    ] = True,
    download: Annotated[bool, typer.Option("--download", help="Download the data set if it is missing.")] = False,
) -> None:
    """Make corrupted copies of images: 15 corruptions and 4 more, at 5 severities.

    cafe-tta corrupt --data photos --output photos-c --severity 5

    Arrays, such as cifar10:test, become the layout of CIFAR-10-C; cifar10-c@DIR names all of it, for `bench`, and cifar10-c:fog-5@DIR one domain, for `adapt`. A run that was stopped goes on when the same command is given again.
    """  # noqa: E501 - a line break here would be one in the help
    began = time.perf_counter()
    chosen_names, severities = choose_names(names), choose_severities(severity or ["1-5"])
    for option, value, known in (("layout", layout, LAYOUTS), ("format", file_format or "png", copies.FORMATS)):
        if value not in known:
            raise ValueError(
                f"unknown --{option} {value!r}{did_you_mean(value, known)}; choose from: {', '.join(known)}"
            )
    imageset = data.load(data_spec, download=download)
    if layout == "auto":
        layout = "folder" if isinstance(imageset, data.FolderSet) else "cifar-c"
    if file_format and layout != "folder":
        raise ValueError(f"--format is for image files, but --layout {layout} has none; say --layout folder")
    chosen = copies.choose(len(imageset), limit, seed)
    left_out: tuple[data.Unreadable, ...] = ()
    if layout != "folder":
        with progress("looking", len(chosen)) as advance:
            chosen, left_out = copies.fitting_one_array(imageset, chosen, advance)
    settings = copies.Settings(
        version=cafe_tta.__version__,
        data=data_spec,
        digest=imageset.digest(),
        limit=limit,
        images=len(chosen),
        corruptions=chosen_names,
        severities=severities,
        preset=copies.check_preset(preset) if preset else copies.preset_for(imageset, chosen),
        seed=seed,
        layout=layout,
        format=file_format or "png" if layout == "folder" else None,
        frost=copies.frost_texture(chosen_names),
        classes=imageset.classes,
    )
    job = copies.Job(imageset, chosen, output, settings)
    copies.start(job)
    if settings.frost == copies.STAND_IN:
        say(
            f'note: frost is made with {copies.STAND_IN}; pip install "cafe-tta[corruptions]" brings the published ones'
        )
    left_out += _make(job, workers)
    _finish(job, left_out, contact_sheet, time.perf_counter() - began)


def choose_names(text: str) -> tuple[str, ...]:
    """Corruptions by their names or by the names of groups, in the usual order.

    >>> choose_names("snow,fog")
    ('snow', 'fog')
    """
    known = (*corruptions.NAMES, *corruptions.HELD_OUT)
    chosen: set[str] = set()
    for name in (part.strip() for part in text.split(",")):
        if name not in known and name not in GROUPS:
            choices = (*GROUPS, *known)
            raise ValueError(
                f"unknown corruption {name!r}{did_you_mean(name, choices)}; choose from: {', '.join(choices)}"
            )
        chosen |= set(GROUPS.get(name, (name,)))
    return tuple(name for name in known if name in chosen)


def choose_severities(texts: Sequence[str]) -> tuple[int, ...]:
    """Severities by numbers and ranges.

    >>> choose_severities(["5", "1-2,2"])
    (1, 2, 5)
    """
    chosen: set[int] = set()
    for part in (part.strip() for text in texts for part in text.split(",")):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end in set("12345") for end in ends) or ends[0] > ends[1]:
            raise ValueError(
                f"expected --severity to be numbers from 1 to 5, such as 5 or 1,3 or 1-5, but got {part!r}"
            )
        chosen |= set(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(chosen))


def _make(job: copies.Job, workers: int) -> tuple[data.Unreadable, ...]:
    from cafe_tta.data.copies.workers import run

    total, made = len(job.chosen) * len(job.settings.domains), 0
    left_out: dict[int, data.Unreadable] = {}
    with StopRequest() as stop, progress("corrupting", total) as advance:
        work = run(job, workers)
        for done in work:
            left_out |= {item.index: item for item in done.left_out}
            made += done.copies
            advance(done.copies)
            if stop.signal_number and made < total:
                work.close()
                text = f"{made} of {counted(total, 'copy', 'copies')} made; the same command goes on"
                raise Interrupted(text, stop.signal_number)
    return tuple(left_out[index] for index in sorted(left_out))


def _finish(job: copies.Job, left_out: tuple[data.Unreadable, ...], contact_sheet: bool, seconds: float) -> None:
    settings, output = job.settings, job.output
    total = len(job.chosen) * len(settings.domains)
    severities = ", ".join(map(str, settings.severities))
    facts = [
        ("images", f"{settings.images}, of {settings.data}"),
        ("copies", f"{total}: {counted(len(settings.corruptions), 'corruption')}, severity {severities}"),
        ("parameters", f"preset {settings.preset}, seed {settings.seed}"),
    ]
    if left_out:
        say_unreadable(list(left_out))
        listed = "".join(f"{item.name}\t{item.why}\n" for item in left_out)
        storage.write_bytes(output / "left-out.txt", listed.encode(errors="surrogateescape"))
        facts.append(("left out", f"{counted(len(left_out), 'image')}, {output / 'left-out.txt'}"))
    if contact_sheet and len(left_out) < len(job.chosen):
        from cafe_tta.data.copies.sheet import contact_sheet as draw

        storage.write_bytes(output / "contact-sheet.png", draw(job))
        facts.append(("picture", str(output / "contact-sheet.png")))
    copies.end(job)
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

"""Facts about single pieces: tables, streams, kernels, textures."""

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from cafe_tta.corruptions import CORRUPTIONS, HELD_OUT, NAMES, PRESETS, blur, corrupt, noise, textures
from cafe_tta.corruptions.randomness import Streams, random_below, random_words

from .pictures import pictures


def test_every_corruption_has_an_id_of_its_own_and_five_rows_in_every_preset() -> None:
    assert tuple(CORRUPTIONS) == NAMES + HELD_OUT and len({row.id for row in CORRUPTIONS.values()}) == 19
    for preset in PRESETS:
        assert all(len(getattr(row, preset)) == 5 for row in CORRUPTIONS.values())


@pytest.mark.parametrize(
    "table",
    [
        noise.gaussian_table(0.1, False),
        noise.gaussian_table(0.6, True),
        noise.poisson_table(500.0),
        noise.poisson_table(3.0),
        noise.impulse_table(0.27),
    ],
)
def test_alias_table_holds_the_probabilities(table: npt.NDArray[np.float64]) -> None:
    np.testing.assert_allclose(table.sum(1), 1)
    entries = noise.alias_table(table).reshape(256, 256)
    share = (entries >> 8) / 2**24  # of each column, that it gives its own level
    found = share.copy()
    for level in range(256):
        np.add.at(found[level], entries[level] & 255, 1 - share[level])
    np.testing.assert_allclose(found / 256, table, atol=1e-8)


def test_noise_tables_by_hand() -> None:
    """Level 100 with noise of standard deviation 25.5; three photons at level 255, expected count 3."""
    assert noise.gaussian_table(0.1, False)[100, 120] == pytest.approx(
        stats.norm.cdf(21 / 25.5) - stats.norm.cdf(20 / 25.5)
    )
    poisson = noise.poisson_table(3.0)[255]
    np.testing.assert_allclose(poisson[[0, 85, 170, 255]], [*stats.poisson.pmf([0, 1, 2], 3), stats.poisson.sf(2, 3)])
    assert noise.impulse_table(0.27)[50, [0, 50, 255]].tolist() == pytest.approx([0.135, 0.73, 0.135])


def test_streams_differ_in_every_part_of_the_key() -> None:
    first = [
        next(iter(Streams(seed, corruption, severity, np.array([index])))).integers(2**63)
        for seed in (0, 1, 2**64 - 1)
        for corruption in (1, 2)
        for severity in (1, 5)
        for index in (0, 1, 2**40)
    ]
    assert len(set(first)) == len(first)


def test_streams_do_not_depend_on_what_was_drawn_before() -> None:
    together = [stream.random(3).tolist() for stream in Streams(1, 2, 3, np.array([4, 5]))]
    (alone,) = (stream.random(3).tolist() for stream in Streams(1, 2, 3, np.array([5])))
    assert together[1] == alone


def test_streams_never_change() -> None:
    """Published results rest on these numbers: a change here is a change of every random corruption."""
    (stream,) = Streams(7, 10, 5, np.array([123]))
    assert random_words(stream, 3).tolist() == [2895215178, 2279874435, 3527935697]


def test_random_below_is_uniform() -> None:
    (stream,) = Streams(0, 5, 5, np.array([0]))
    counts = np.bincount(random_below(stream, 36, 72_000))
    assert len(counts) == 36 and stats.chisquare(counts).pvalue > 1e-4


def test_zoom_factors_keep_the_rounding_of_arange() -> None:
    def count(preset: str) -> list[int]:
        return [len(np.arange(*row)) for row in getattr(CORRUPTIONS["zoom_blur"], preset)]

    assert count("imagenet") == [12, 16, 11, 13, 11]
    assert count("cifar") == count("tinyimagenet") == [7, 12, 16, 21, 26]


def test_zoom_matrix_keeps_flat_images() -> None:
    total = blur.zoom_matrix(20, 30, 1, 1.26, 0.01) @ np.ones(600, np.float32)
    np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_small_disks_are_a_single_pixel() -> None:
    assert blur.disk_kernel(0.3, 0.4).shape == (3, 3)
    assert blur.disk_kernel(10, 0.5).shape == (21, 21)


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_sources_follow_the_sequential_loop(reach: int) -> None:
    height, width = 20, 17
    rows, columns = height - 2 * reach, width - 2 * reach
    choices = np.random.default_rng(0).integers(0, 4 * reach * reach, (3, rows, columns))
    found = blur.copy_sources(choices, height, width, reach).reshape(3, -1)
    for n in range(3):
        held = np.arange(height * width).reshape(height, width)
        for h in range(height - reach, reach, -1):
            for w in range(width - reach, reach, -1):
                dy, dx = divmod(int(choices[n, h - reach - 1, w - reach - 1]), 2 * reach)
                held[h, w] = held[h + dy - reach, w + dx - reach]
        assert (found[n] - n * height * width == held.ravel()).all()


def test_glass_blur_overwrites_instead_of_swapping() -> None:
    choices = np.random.default_rng(0).integers(0, 4, (1, 62, 62))
    assert len(set(blur.copy_sources(choices, 64, 64, 1).tolist())) < 0.8 * 64 * 64


def test_frost_textures_are_the_published_five() -> None:
    assert [t.shape for t in textures.textures(1.0, 224, 224)] == [
        (600, 900, 3),
        (315, 560, 3),
        (315, 560, 3),  # the published third picture equals the second
        (350, 527, 3),
        (495, 660, 3),
    ]


def test_frost_textures_grow_to_cover_large_images() -> None:
    for texture in textures.textures(0.2, 100, 400):
        assert texture.shape[0] > 100 and texture.shape[1] > 400


# Damage grows with severity wherever the published parameters make it grow. Elsewhere a later severity may be
# the milder one in mean difference: pixelate at 0.5 hits whole pixels and at 0.6 does not, frost darkens the
# image while it covers it, CIFAR's motion blur and ImageNet's fog keep a parameter from one severity to the
# next.
GROWING = [
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
]
GROWING += ["jpeg_compression", "speckle_noise", "gaussian_blur"]


def damage(name: str, severity: int, preset: str) -> float:
    images = pictures(12, 64, 64)
    return float(np.abs(corrupt(images, name, severity, preset=preset).astype(int) - images).mean())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", GROWING)
def test_damage_grows_with_severity(name: str, preset: str) -> None:
    assert (np.diff([damage(name, severity, preset) for severity in range(1, 6)]) > 0).all()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["glass_blur", "motion_blur", "snow", "fog", "pixelate"])
def test_the_last_severity_is_worse_than_the_first(name: str, preset: str) -> None:
    assert damage(name, 5, preset) > damage(name, 1, preset)


def test_zoom_blur_of_large_images_is_the_same_by_axes_as_by_one_matrix():
    from cafe_tta.corruptions import blur

    image = np.random.default_rng(0).integers(0, 256, (1, 61, 83, 3), dtype=np.uint8)
    for parameters in ((1, 1.11, 0.01), (1, 1.31, 0.03)):
        whole = blur.zoom_blur(image, None, *parameters)[0].astype(int)
        by_axes = blur._zoom_blur_by_axes(image[0], *parameters).astype(int)
        assert np.abs(whole - by_axes).max() <= 1 and (whole != by_axes).mean() < 0.001

"""What a leader offers to its followers: its standing, its snapshot, and to adapt to the images that they send."""

import asyncio
import re

import torch
from starlette.requests import Request

from cafe_tta.serve.http.body import Lease, read_body
from cafe_tta.serve.http.inference import Inference
from cafe_tta.serve.http.middleware import ServeError, bad_request, check_token
from cafe_tta.serve.http.protocol import LARGEST
from cafe_tta.serve.leader import FOLLOWER, Outgoing, unpack_images


def require_follower(request: Request, token: str | None, inference: Inference) -> None:
    """Refuses everybody but followers, who have the token; and to lead, where this server follows another itself."""
    if token is None:
        raise ServeError(403, "followers need a token: start their leader with `token`, and each of them with the same")
    check_token(request, token)
    if inference.settings.leader is not None:
        raise ServeError(409, "this server follows another, and leads nobody; give its leader's address instead")


def follower_name(name: str) -> str:
    if not re.fullmatch(FOLLOWER, name, re.ASCII):
        raise bad_request(f"expected the parameter follower to be letters, digits and . : _ -, but got {name[:80]!r}")
    return name


async def receive(request: Request, inference: Inference) -> list[Outgoing]:
    """Passes the images that a follower sent to the model, as if they had come here; those that were taken in."""
    settings, signature = inference.settings, inference.signature
    side = signature.preprocessing.size
    with inference.occupied(), Lease(inference.pending) as lease:
        body = await read_body(request, lease, settings.max_body_bytes, settings.body_timeout_seconds)
        lease.grow_to(3 * len(body))  # once more as bytes, and as images
        try:
            images = await inference.decode(
                lambda: unpack_images(bytes(body), (3, side, side), settings.max_batch_size, LARGEST)
            )
        except ValueError as error:
            raise bad_request(str(error)[:300]) from None
        taken = [each for each in images if _is_admitted(inference, each)]
        await _learn(inference, taken)
        return taken


def _is_admitted(inference: Inference, image: Outgoing) -> bool:
    """Whether an image's camera may use its name here; a follower may have another list of tokens, or an older one."""
    credentials = inference.credentials
    if credentials is None or image.verified:
        return True
    return not credentials.knows(image.camera) and inference.settings.unknown_cameras != "refuse"


async def _learn(inference: Inference, images: list[Outgoing]) -> None:
    """Answers the images of each camera, to be adapted to. The answers were given by the follower."""
    batcher = inference.require_batcher()
    groups: dict[tuple[str, bool], list[Outgoing]] = {}
    for each in images:
        groups.setdefault((each.camera, each.verified), []).append(each)
    timeout = inference.settings.default_timeout_microseconds / 1e6
    with batcher.reserve(len(images)):
        answers = [
            batcher.submit(
                torch.stack([each.image for each in group]), camera, True, timeout, verified, group[-1].request
            )
            for (camera, verified), group in groups.items()
        ]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, ServeError) and outcome.status == 400:
            continue  # images that the model cannot answer, which the follower need not hear of
        if isinstance(outcome, BaseException):
            raise outcome

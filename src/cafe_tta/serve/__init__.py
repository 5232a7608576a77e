"""The server: one model that answers images from many cameras, and adapts behind its answers.

The modules of this package are the service, which knows tensors and no HTTP; `http` is the server around it.

    service = serve.build(serve.load_settings({"model": "model.safetensors", "source": ["stats.safetensors"]})).service
    service.start()
    answers = service.answer(images, cameras=["gate"] * len(images), adapt=[True] * len(images))
"""

from cafe_tta.serve.build import Built, build
from cafe_tta.serve.service import Answers, Service
from cafe_tta.serve.settings import Settings, load_settings

__all__ = ["Answers", "Built", "Service", "Settings", "build", "load_settings"]

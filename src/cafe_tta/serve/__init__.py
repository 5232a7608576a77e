"""The server: models that answer images from many cameras, and adapt behind their answers.

The modules of this package are the service, which knows tensors and no HTTP; `http` is the server around it.

    service = serve.build(serve.load_settings({"model": "model.safetensors", "source": ["stats.safetensors"]})).service
    service.start()
    answers = service.answer(images, cameras=["gate"] * len(images), adapt=[True] * len(images))
"""

from cafe_tta.serve.build import Built as Built
from cafe_tta.serve.build import build as build
from cafe_tta.serve.service import Answers as Answers
from cafe_tta.serve.service import Service as Service
from cafe_tta.serve.settings import Settings as Settings
from cafe_tta.serve.settings import load_models as load_models
from cafe_tta.serve.settings import load_settings as load_settings

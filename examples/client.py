"""Sends image files to the server and prints its answers, with nothing but the standard library.

    cafe-tta serve &
    python examples/client.py http://127.0.0.1:8080 photo.jpg more/*.png --camera gate-1

The files go over the wire as they are; the server decodes and resizes them. tritonclient is faster for raw pixels
(docs/serving.md).
"""

import argparse
import base64
import json
import urllib.request
from pathlib import Path
from typing import Any


def ask(url: str, content: Any = None) -> Any:
    """The answer of an address, as JSON; with content, by POST."""
    body = None if content is None else json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        return json.load(answer)


def classify(url: str, model: str, files: list[Path], camera: str) -> dict[str, Any]:
    """Class, confidence and model version for some files, which count as images of one camera."""
    pictures = [base64.b64encode(file.read_bytes()).decode() for file in files]
    request = {
        "inputs": [{"name": "images", "datatype": "BYTES", "shape": [len(files)], "data": pictures}],
        "outputs": [{"name": "label"}, {"name": "probability"}],
        "parameters": {"camera": camera},
    }
    answer = ask(f"{url}/v2/models/{model}/infer", request)
    return {output["name"]: output["data"] for output in answer["outputs"]} | {"parameters": answer["parameters"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8080")
    parser.add_argument("files", nargs="+", type=Path, help="JPEG or PNG files")
    parser.add_argument("--model", default="digits", help="name of the model on the server")
    parser.add_argument("--camera", default="default", help="name of the camera, under which drift is reported")
    parser.add_argument("--batch", type=int, default=32, help="files a request")
    options = parser.parse_args()
    for start in range(0, len(options.files), options.batch):
        files = options.files[start : start + options.batch]
        answer = classify(options.url.rstrip("/"), options.model, files, options.camera)
        for file, label, probability in zip(files, answer["label"], answer["probability"], strict=True):
            print(f"{file}: class {label}, {100 * probability:.0f} %")
    print(f"last answer by version {answer['parameters']['model_version']} of the model; 0 is the source model")


if __name__ == "__main__":
    main()

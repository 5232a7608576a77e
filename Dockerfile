# The server in a container, on CPUs: docker build -t cafe-tta . (docs/deploy.md)
FROM python:3.12-slim AS build
WORKDIR /build
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
# torch and torchvision of PyTorch's own index are a pair without CUDA: some hundred MB instead of several GB.
RUN python -m venv /opt/cafe-tta \
    && /opt/cafe-tta/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        -c constraints.txt ".[serve,models]"

FROM python:3.12-slim
RUN useradd --system --uid 10001 --home-dir /state --create-home cafe
COPY --from=build /opt/cafe-tta /opt/cafe-tta
ENV PATH=/opt/cafe-tta/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CAFE_TTA_CACHE=/state/cache \
    CAFE_TTA_SERVE_STATE=/state/adapted \
    CAFE_TTA_SERVE_HOST=0.0.0.0 \
    CAFE_TTA_SERVE_PORT=8080
USER 10001
WORKDIR /state
VOLUME /state
EXPOSE 8080
# Ready is after the model is loaded; without a model of yours, the embedded digits are trained first.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/v2/health/ready', timeout=4)"]
ENTRYPOINT ["cafe-tta"]
CMD ["serve"]

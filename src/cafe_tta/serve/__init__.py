"""The server: one model, images from many cameras. `service` knows no HTTP, `app` knows no tensors."""

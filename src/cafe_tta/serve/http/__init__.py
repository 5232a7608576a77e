"""The HTTP side of the server: the Open Inference Protocol, health, metrics, controls and the dashboard."""

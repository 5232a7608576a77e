"""Simulated cameras that send labelled images to a server, and compare its answers with the unadapted model's.

Knows the server by HTTP alone.
"""

from cafe_tta.simulate.client import Client
from cafe_tta.simulate.scenarios import SCENARIOS
from cafe_tta.simulate.simulation import Simulation, SimulationOptions
from cafe_tta.simulate.summary import Summary
from cafe_tta.simulate.weather import make_cameras

__all__ = ["SCENARIOS", "Client", "Simulation", "SimulationOptions", "Summary", "make_cameras"]

# For pyright alone; nothing imports it. The module names what _jax has.
from typing import Any

from jaxlib._jax import Client as Client
from jaxlib._jax import Device as Device

def __getattr__(name: str) -> Any: ...

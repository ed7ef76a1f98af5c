# For pyright alone; nothing imports it. This module of jaxlib is C++ without types, so
# that every parameter of JAX that may be a Device or a Client is unknown.
from typing import Any

class Client: ...

class Device:
    id: int
    platform: str
    device_kind: str
    process_index: int
    client: Client

def __getattr__(name: str) -> Any: ...

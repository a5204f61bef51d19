"""Entry point of group `torch.backends`: `import torch` calls `register()`, so scripts need no line about ringweave."""



def register() -> None:
    """Make the backend "ringweave" known to torch.distributed.

    Imports nothing heavy and never raises: a failure here would break `import torch` for everybody.
    """

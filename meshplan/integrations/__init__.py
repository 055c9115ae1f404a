"""meshplan in parts of torch, and of other libraries, that do not redistribute DTensors.

Each module is imported by name, such as ``meshplan.integrations.ddp``; none is imported here.
They use public hooks; what else is set is named in the module.
"""

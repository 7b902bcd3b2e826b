"""launchers: how the processes of workers are started and ended. What they say goes over the links of the gateway, not through here.

Reading order: launcher (what all of them promise), local (this host), guard, host, ray_wire, ray_driver (other hosts, placed by Ray), ray
(the gateway's end of it). Only ray_driver imports Ray, in a process of its own: the gateway does not end with it.
"""

"""Names of things: who is who in events, records and metrics."""

from typing import NewType

RequestId = NewType("RequestId", int)
"""One logical request, minted by the driver, never reused within a plane's life."""
AttemptId = NewType("AttemptId", int)
"""One try of a request on one replica, minted by the plane; what engines and streams know."""
DecisionId = NewType("DecisionId", int)
"""One decision, counted by the plane; callers see it in headers and error bodies."""
Incarnation = NewType("Incarnation", int)
"""One life of a replica. Counts belong to it, not to the name (trap 16)."""
TenantId = NewType("TenantId", str)
"""Who pays; comes from the key, never from a request body."""
ClassName = NewType("ClassName", str)
"""A service class such as `interactive`."""
ModelName = NewType("ModelName", str)
"""A deployed model by its canonical name; aliases are resolved before the plane."""
ReplicaName = NewType("ReplicaName", str)
"""A replica group by name; it may come back as another incarnation."""
PoolName = NewType("PoolName", str)
"""A pool of equal replicas."""

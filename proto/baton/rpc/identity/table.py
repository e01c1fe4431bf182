"""Which service may call which method: every method of every .proto, and the services that it accepts. The only table.

It applies wherever clients present certificates (--tls-ca). Methods that are not in it are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.rpc.identity.identity import ENVOY, GATEWAY, KVSTORE, OPERATOR, ROUTER, SERVICES, WORKER

# Clients of the fleet, without certificates: their keys and tenants are checked instead of this table.
ANYBODY = frozenset({"anybody"})
ANY_SERVICE = frozenset(SERVICES)

# Not methods: sending KV to a worker's transfer port, and reading an inner service's /metrics.
KV_SENDERS = frozenset({WORKER})
METRICS_READERS = frozenset({OPERATOR})

ACCEPTED: Mapping[str, frozenset[str]] = {
    "baton.v1.InferenceService/Generate": ANYBODY,
    "baton.v1.InferenceService/Embed": ANYBODY,
    "baton.v1.InferenceService/Score": ANYBODY,
    "baton.v1.InferenceService/Rerank": ANYBODY,
    "baton.v1.InferenceService/Classify": ANYBODY,
    "baton.v1.InferenceService/Pool": ANYBODY,
    "baton.v1.InferenceService/ListModels": ANYBODY,
    "baton.v1.InferenceService/Tokenize": ANYBODY,
    "baton.v1.InferenceService/Detokenize": ANYBODY,
    "baton.v1.InferenceService/GetTokenizer": ANYBODY,
    "baton.v1.InferenceService/GetServerInfo": ANYBODY,
    "baton.v1.InferenceService/Abort": ANYBODY,
    "baton.v1.InferenceService/AddAdapter": ANYBODY,
    "baton.v1.InferenceService/RemoveAdapter": ANYBODY,
    "baton.v1.InferenceService/CreateResponse": ANYBODY,
    "baton.v1.InferenceService/GetResponse": ANYBODY,
    "baton.v1.InferenceService/WatchResponse": ANYBODY,
    "baton.v1.InferenceService/CancelResponse": ANYBODY,
    "baton.v1.InferenceService/DeleteResponse": ANYBODY,
    "baton.v1.InferenceService/ListResponseInput": ANYBODY,
    "baton.v1.InferenceService/CreateConversation": ANYBODY,
    "baton.v1.InferenceService/GetConversation": ANYBODY,
    "baton.v1.InferenceService/UpdateConversation": ANYBODY,
    "baton.v1.InferenceService/DeleteConversation": ANYBODY,
    "baton.v1.InferenceService/AddConversationItems": ANYBODY,
    "baton.v1.InferenceService/ListConversationItems": ANYBODY,
    "baton.v1.InferenceService/GetConversationItem": ANYBODY,
    "baton.v1.InferenceService/DeleteConversationItem": ANYBODY,
    "baton.v1.RouterService/Place": frozenset({GATEWAY}),
    "baton.v1.RouterService/PlaceStream": frozenset({GATEWAY}),
    "baton.v1.RouterService/Report": frozenset({GATEWAY}),
    "baton.v1.RouterService/WatchModels": frozenset({GATEWAY}),
    # Routers ask each other about placements that they do not know.
    "baton.v1.RouterService/Explain": frozenset({OPERATOR, ROUTER}),
    # Gateways carry out what holders of admin keys ask for.
    "baton.v1.RouterService/ListWorkers": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.RouterService/GetFleet": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.RouterService/Cordon": frozenset({OPERATOR}),
    "baton.v1.RouterService/Uncordon": frozenset({OPERATOR}),
    "baton.v1.RouterPeerService/Share": frozenset({ROUTER}),
    "baton.v1.WorkerService/GenerateStream": frozenset({GATEWAY}),
    "baton.v1.WorkerService/PrefillStream": frozenset({WORKER}),
    "baton.v1.WorkerService/WatchState": frozenset({ROUTER}),
    "baton.v1.ControlService/Drain": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/Pause": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/Resume": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/Sleep": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/WakeUp": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/ReloadWeights": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/SwitchRole": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/LoadAdapter": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/UnloadAdapter": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/GetStats": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/ResetPrefixCache": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/StartProfile": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.ControlService/StopProfile": frozenset({GATEWAY, OPERATOR}),
    "baton.v1.IndexService/Publish": frozenset({WORKER}),
    "baton.v1.IndexService/Watch": frozenset({KVSTORE, ROUTER}),
    "envoy.service.auth.v3.Authorization/Check": frozenset({ENVOY}),
    # Says no more than whether the process serves: probes show any certificate of the fleet.
    "grpc.health.v1.Health/Check": ANY_SERVICE,
    "grpc.health.v1.Health/List": ANY_SERVICE,
    "grpc.health.v1.Health/Watch": ANY_SERVICE,
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": frozenset({OPERATOR}),
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({OPERATOR}),
}


def accepted_by(method: str) -> frozenset[str]:
    """Returns the services that `method`, as gRPC names it (/package.Service/Method), accepts. Empty: none."""
    return ACCEPTED.get(method.removeprefix("/"), frozenset())

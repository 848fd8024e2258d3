"""Post-trains language models with reinforcement learning, as four services and one gRPC contract."""

import os

# gRPC's core tells people at their terminal about every connection that closes. It reads this once, when it is
# first imported. With INFO it also says why a TLS handshake was refused.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

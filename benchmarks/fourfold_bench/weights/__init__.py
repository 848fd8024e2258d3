"""`fourfold bench weights`: how long a weight update takes on this machine, and what it costs.

    command   the arguments                     suite     many configurations, each in a process of its own
    rounds    what is measured, in which order  table     what is printed
    ranks     the trainer's processes (rank)    engine    a real vLLM (worker) with streams that decode
    loop      for comparison: tensor by tensor  memory    of the GPUs, from outside
    services  the same through gRPC             streams   that decode there, and what became of their tokens

The updates go through `fourfold.weights.local`, so that this measures what a script gets; the services add their gRPC
calls and streams. Nothing is imported here.
"""

"""The processes of a mesh: router, worker, scheduler, and `local`, which starts all of them on one
machine. They talk to each other by gRPC alone and import only `libs`; `local` imports them."""

"""Memory management: which models and adapters are on the device, in host memory or being loaded,
and how many bytes each takes. This package loads and evicts; it runs no forward pass and answers no
job."""

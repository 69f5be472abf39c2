"""Which models and adapters are on the device, in host memory or on their way, and what each takes. It loads and evicts; it
runs no forward pass and answers no job."""

"""NV-Embed: dense vectors by a latent attention layer."""

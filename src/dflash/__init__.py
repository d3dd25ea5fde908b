"""Train DFlash drafters: block-diffusion models that draft a block of tokens in one pass for a large target model."""

__version__ = "0.1.0"

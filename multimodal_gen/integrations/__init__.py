"""Attention of stock diffusers pipelines and transformers encoders."""

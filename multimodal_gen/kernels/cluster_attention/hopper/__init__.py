"""Attention of clusters to clusters on SM90."""

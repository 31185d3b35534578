"""Attention of clusters of queries to clusters of keys, of any size, each with its own choice.

`plan` says which clusters are kept and turns that into blocks of the block-sparse engine, and `api`
attends.
"""

"""Attention of clusters of queries to clusters of keys, of any size, each with its own choice.

`selection` says which clusters are kept, `plan` turns that into blocks of the block-sparse engine,
and `api` attends.
"""

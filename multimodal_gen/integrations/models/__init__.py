"""What has to be known of the model families of stock pipelines."""

"""State that lives for the length of one denoiser call."""

"""Downloads: from shares on servers to verified plaintext."""

"""Images on disk: folders, lists, shards and the embedded digits."""

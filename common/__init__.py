"""Engine-neutral core of mooncake-kv: configuration, identity, hashing, page format, KV views and the node. Imports no engine."""

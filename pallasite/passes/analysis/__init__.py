"""Facts about a kernel that passes and backends ask for; nothing is changed here."""

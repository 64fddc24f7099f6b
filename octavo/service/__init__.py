"""The shell kit every service is built with: server, errors, logs, telemetry, columns."""

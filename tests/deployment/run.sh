#!/usr/bin/env bash
# FedHPL, SGPT, FedL2G and FedOTP through a real SuperLink and three SuperNodes on loopback, compared bit by bit with the plain loop; run by
# hand, some minutes. Needs the extra `flower`: pip install -e ".[test,flower]". --insecure is plain HTTP, for loopback alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python tests/deployment/deploy.py "$@"

#!/bin/sh
# Fails unless it is root in fact: writes where only root may.
if [ "$(id -u)" != 0 ]; then
    echo "this image must run as root, but runs as uid $(id -u)" >&2
    exit 13
fi
touch /etc/everstep-root-was-here || exit 14
echo "running as root"

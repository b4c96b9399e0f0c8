"""Runs a command as a container engine would with the device of `partywall container setup`: `contain.py IMAGE NAME COMMAND ...`.

The caller has made new namespaces for mounts and processes. The image's folder becomes the root. It gets the mounts and variables of the specification, the
folders of the tests, and this system's /usr if it has no Python. NAME is the container's domain.
"""

import json
import os
import subprocess
import sys

image, name, command = sys.argv[1], sys.argv[2], sys.argv[3:]
with open("/etc/cdi/partywall.json", encoding="utf-8") as file:
    edits = json.load(file)["devices"][0]["containerEdits"]


def mount(source, target, options):
    place = image + target
    os.makedirs(place, exist_ok=True)
    # As engines do: some options count in a second call only.
    kind = "rbind" if "rbind" in options else "bind"
    rest = [option for option in options if option not in ("rbind", "rprivate")]
    subprocess.run(["mount", "-o", kind, source, place], check=True)
    subprocess.run(["mount", "-o", ",".join(["remount", "bind", *rest]), place], check=True)


# An image with an interpreter is of another system, whose programs and libraries it has.
if not os.path.exists(f"{image}/usr/bin/python3"):
    mount("/usr", "/usr", ["ro"])
mount("/mnt/here", "/here", ["ro"])
mount("/tmp/state", "/state", ["rw"])
for entry in edits["mounts"]:
    mount(entry["hostPath"], entry["containerPath"], entry["options"])
os.makedirs(f"{image}/proc", exist_ok=True)
subprocess.run(["mount", "-t", "proc", "proc", f"{image}/proc"], check=True)
os.chroot(image)
os.chdir("/")
environment = {"PATH": "/usr/bin:/bin", "PARTYWALL_DOMAIN": name}
environment.update(variable.split("=", 1) for variable in edits["env"])
os.execve(command[0], command, environment)

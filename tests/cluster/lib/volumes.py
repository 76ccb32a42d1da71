"""Volumes for claims: directories of this machine, offered beforehand as PersistentVolumes of the default storage class."""
from lib.settings import STORAGE_CLASS, VOLUMES, VOLUMES_DIR


def make():
    for index in range(VOLUMES):
        path = VOLUMES_DIR / f"{index:02d}"
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)  # hostPath knows no fsGroup.


def objects():
    return [
        {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
         "metadata": {"name": STORAGE_CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
         "provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer", "reclaimPolicy": "Retain"},
        *({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"diloco-test-{index:02d}"},
           "spec": {"capacity": {"storage": "100Gi"}, "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                    "persistentVolumeReclaimPolicy": "Retain", "storageClassName": STORAGE_CLASS,
                    "hostPath": {"path": str(VOLUMES_DIR / f"{index:02d}")}}} for index in range(VOLUMES))]

"""The operator as a process against a real kube-apiserver and etcd. No kubelet: tests say what became of pods."""

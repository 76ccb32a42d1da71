// The yardstick of the operator's benchmark: a controller as it is usually written in Go, with client-go's shared informers and
// work queue. It watches pods, nodes and jobs, and makes a learner's pod anew when it is gone; nothing else.
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
)

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func replacement(gone *corev1.Pod) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: gone.Namespace, Labels: map[string]string{}, OwnerReferences: gone.OwnerReferences},
		Spec:       *gone.Spec.DeepCopy(),
	}
	for key, value := range gone.Labels {
		pod.Labels[key] = value
	}
	incarnation, _ := strconv.Atoi(gone.Labels["diloco.dev/incarnation"])
	pod.Labels["diloco.dev/incarnation"] = strconv.Itoa(incarnation + 1)
	pod.Name = gone.Name[:strings.LastIndex(gone.Name, "-")+1] + strconv.Itoa(incarnation+1)
	pod.Spec.NodeName = ""
	return pod
}

func main() {
	config, err := clientcmd.BuildConfigFromFlags("", os.Args[1])
	fatal(err)
	config.QPS, config.Burst = 2000, 4000
	client, err := kubernetes.NewForConfig(config)
	fatal(err)
	other, err := dynamic.NewForConfig(config)
	fatal(err)
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]())
	var gone sync.Map // Keys of the queue to the pods that are to be made again.
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	factory.Core().V1().Nodes().Informer()
	factory.Apps().V1().StatefulSets().Informer()
	_, err = pods.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(object interface{}) {
		if pod, ok := object.(*corev1.Pod); ok && pod.Labels["diloco.dev/learner-id"] != "" {
			gone.Store(pod.Namespace+"/"+pod.Name, pod)
			queue.Add(pod.Namespace + "/" + pod.Name)
		}
	}})
	fatal(err)
	jobs := dynamicinformer.NewDynamicSharedInformerFactory(other, 0)
	jobs.ForResource(schema.GroupVersionResource{Group: "diloco.dev", Version: "v1alpha1", Resource: "decoupleddilocojobs"}).Informer()
	stop := make(chan struct{})
	factory.Start(stop)
	jobs.Start(stop)
	factory.WaitForCacheSync(stop)
	jobs.WaitForCacheSync(stop)
	go func() {
		http.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
		fatal(http.ListenAndServe(os.Args[2], nil))
	}()
	for {
		key, _ := queue.Get()
		if pod, ok := gone.LoadAndDelete(key); ok {
			made := replacement(pod.(*corev1.Pod))
			if _, err := client.CoreV1().Pods(made.Namespace).Create(context.Background(), made, metav1.CreateOptions{}); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
		queue.Done(key)
	}
}

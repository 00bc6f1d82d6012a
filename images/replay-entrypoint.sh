#!/bin/bash
# Starts the command that Spark on Kubernetes gives a container: `driver …`, `executor`, or any other command.
set -euo pipefail

# Runs a driver, which gets SIGTERM later than this does: at that Spark stops all tasks at once. By then a run whose
# Replay was deleted has seen that itself, has settled its in-flight messages, and has ended. Kubernetes allows 30 s.
drain() {
  stopped=
  trap 'stopped=yes' TERM  # also of one that comes before there is a driver
  "$@" &
  driver=$!
  trap 'trap "" TERM; stopped=yes; { sleep 20; kill -TERM "$driver"; } &>/dev/null &' TERM
  [ -z "$stopped" ] || kill -TERM $$
  code=0; wait "$driver" || code=$?
  if [ -n "$stopped" ]; then  # it was the signal that ended the wait
    code=0; wait "$driver" || code=$?
  fi
  exit "$code"
}

case "${1:-}" in
  driver)
    shift
    set -- "$0" drain "$SPARK_HOME/bin/spark-submit" --deploy-mode client \
      --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
      --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" "$@"
    ;;
  drain)
    shift
    drain "$@"
    ;;
  executor)
    options=()
    while read -r name; do  # by number: SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, …
      options+=("${!name}")
    done < <(compgen -e SPARK_JAVA_OPT_ | sort --version-sort)
    set -- "$JAVA_HOME/bin/java" "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
      -cp "${SPARK_CONF_DIR:-$SPARK_HOME/conf}:$SPARK_HOME/jars/*" \
      org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
      --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
      --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
      --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
esac
exec tini -s -- "$@"

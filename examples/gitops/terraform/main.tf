# A connection and a policy of the team shop. The kinds must exist when Terraform plans: install the operator in another
# configuration, which is applied first.
terraform {
  required_providers {
    kubernetes = {
      source  = "hashicorp/kubernetes"
      version = ">= 2.30"
    }
  }
}

resource "kubernetes_manifest" "connection" {
  manifest = {
    apiVersion = "redrive.io/v1beta1"
    kind       = "BrokerConnection"
    metadata   = { name = "main", namespace = "shop" }
    spec = {
      pulsar = {
        serviceURL = "pulsar://pulsar.example:6650"
        adminURL   = "http://pulsar.example:8080"
        authentication = {
          type  = "Token"
          token = { secretRef = { name = "pulsar-admin", key = "token" } }
        }
      }
      allow = [
        { name = "shop", topics = ["persistent://shop/*/*"], roles = ["shop.*"] },
      ]
    }
  }

  # Annotations that people set, such as a pause, stay.
  computed_fields = ["metadata.annotations", "metadata.labels"]
  field_manager {
    name = "terraform"
  }
  wait {
    condition {
      type   = "Ready"
      status = "True"
    }
  }
  timeouts {
    create = "5m"
    update = "5m"
  }
}

resource "kubernetes_manifest" "policy" {
  manifest = {
    apiVersion = "redrive.io/v1beta1"
    kind       = "RetryPolicy"
    metadata   = { name = "orders-fulfilment", namespace = "shop" }
    spec = {
      connectionRef = { name = "main" }
      topic         = "persistent://shop/prod/orders"
      subscription  = "fulfilment"
      maxRetries    = 3
      delayLadder   = { delays = ["1s", "10s", "1m"] }
      consumerRoles = ["shop.fulfilment"]
    }
  }

  computed_fields = ["metadata.annotations", "metadata.labels"]
  field_manager {
    name = "terraform"
  }
  wait {
    condition {
      type   = "Ready"
      status = "True"
    }
  }
  timeouts {
    create = "5m"
    update = "5m"
  }
  depends_on = [kubernetes_manifest.connection]
}
